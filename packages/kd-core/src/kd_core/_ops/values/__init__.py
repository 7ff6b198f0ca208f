"""Where and how leaves are stored, filled and copied; it must not know how keys are arranged."""
