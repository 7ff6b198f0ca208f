"""The operations of a container, one concern a module; none knows another."""
