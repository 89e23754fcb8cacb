"""Admission control: reserves what a request may use from every limit of its tenant, key and adapter, or from none."""
