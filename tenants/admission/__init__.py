"""Admission: what a request may use is taken at once from every limit of its tenant, key and adapter, or not at all."""
