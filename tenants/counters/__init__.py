"""Quota counters in Valkey, changed by Lua scripts only."""
