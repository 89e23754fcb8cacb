"""Adapter blobs, stored by content: in a local folder or an S3 bucket."""
