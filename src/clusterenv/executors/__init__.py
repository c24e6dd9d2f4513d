"""How requests reach workers: processes of this machine, the calling process, other machines."""
