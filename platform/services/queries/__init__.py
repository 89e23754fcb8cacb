"""Reads of the console, one module per noun: functions of a session in the viewer's role that return plain dataclasses."""
