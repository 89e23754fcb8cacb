"""Errors that stop a command before it serves. Each ends the process with its `exit_code` and one clear line.

StartError                 exit code 1
├── SettingsError          exit code 2: a wrong setting, named with its value and what is allowed
├── PortTaken              the address cannot be listened on
├── EngineStartFailed      the engine process did not become ready
├── DependencyFailed       PostgreSQL, Valkey or the blob store could not be reached or started
│   └── StageHung          a stage of the start does not end; its threads can be ended with the process only
├── SecretRefused          the server secret is missing, or another one than sealed the database
├── MachineUnfit           a file, a disk or a limit of this machine stops the start
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


class StageHung(DependencyFailed):
    pass


class SecretRefused(StartError):
    pass


class MachineUnfit(StartError):
    pass


class RequestFailed(StartError):
    pass
