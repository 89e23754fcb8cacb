"""Resumable uploads in parts."""
