"""Value validation in processes that can be killed."""
