"""Errors that stop a command before it serves. Each ends the process with its `exit_code` and one clear line.

StartError                 exit code 1
├── SettingsError          exit code 2: a wrong setting, named with its value and what is allowed
├── PortTaken              the address cannot be listened on
├── EngineStartFailed      the engine process did not become ready
├── DependencyFailed       PostgreSQL or Valkey could not be reached or started
└── RequestFailed          a server elsewhere refused a command's request or did not respond
"""


class StartError(Exception):
    """Base of all start errors."""

    exit_code = 1


class SettingsError(StartError):
    exit_code = 2


class PortTaken(StartError):
    def __init__(self, host: str, port: int, reason: str, flag: str = "--port") -> None:
        super().__init__(f"cannot listen on {host}:{port}: {reason}; choose another with {flag}")


class EngineStartFailed(StartError):
    pass


class DependencyFailed(StartError):
    pass


class RequestFailed(StartError):
    pass
