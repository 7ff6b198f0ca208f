"""The operations of a container, one concern in each module; no module knows another."""
