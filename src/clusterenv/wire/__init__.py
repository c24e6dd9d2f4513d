"""Every message and every encoding; no sockets."""
