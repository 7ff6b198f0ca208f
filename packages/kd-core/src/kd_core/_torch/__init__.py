"""What torch calls: torch functions, pytrees, pickling, data loading.

Knows every container kind; nothing of kd_core may depend on it.
"""
