"""When newer weights are sent to a machine: rules, drift and versions."""
