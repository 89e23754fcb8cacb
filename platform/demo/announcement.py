"""Text that `serve --demo` prints when it is ready: addresses, a key per tenant, and requests to paste."""

from pathlib import Path

from loraplex.platform.demo.demo_file import DemoAccess
from loraplex.platform.demo.snippet import curl_snippet, python_snippet


def announcement(access: DemoAccess, demo_file: Path) -> str:
    """Build the text, without colours and wrapping, so that every line can be copied."""
    first = access.tenants[0]
    return "\n".join(
        (
            f"Serving {access.model} at {access.base_url}/v1",
            *_console(access),
            "",
            *(
                f"  {tenant.name}: adapter {', '.join(tenant.adapters)}, key {tenant.api_key}"
                for tenant in access.tenants
            ),
            "",
            f"Admin and operator keys: {demo_file}",
            "",
            f"Ask {first.name}'s adapter {first.adapters[0]} with curl:",
            "",
            curl_snippet(access.base_url, first.api_key, first.adapters[0]),
            "",
            "or in Python:",
            "",
            python_snippet(access.base_url, first.api_key, first.adapters[0]),
        )
    )


def _console(access: DemoAccess) -> tuple[str, ...]:
    if access.console_url is None:
        return ()
    return (f"Console, signed in once as an admin of {access.tenants[0].name}: {access.console_url}",)
