"""Integration with torch: torch functions, pytrees, pickling, data loading.

Knows every container kind; no other part of kd_core may depend on it.
"""
