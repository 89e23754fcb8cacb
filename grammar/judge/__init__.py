"""Finished values result in processes that can be killed."""
