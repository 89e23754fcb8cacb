"""Finished values judged in processes that can be killed."""
