"""The node agent: one process per machine of a cluster."""
