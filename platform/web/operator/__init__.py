"""The operator plane, `/operator/v1`: tenants, their limits and shares, engines, and the whole audit log."""
