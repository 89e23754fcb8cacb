"""What every route of the tenant and operator planes is made of: bodies, answers, preconditions, pages, one transaction."""
