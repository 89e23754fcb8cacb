"""Worker pool: killable, sandboxed processes that run functions of other packages. It knows none of them."""
