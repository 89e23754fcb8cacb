"""What a terminal shows after a program has written to it."""

import re

CONTROL = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|(\r)|(\n)|([^\x1b\r\n]+)")
UP, ERASE_IN_LINE = "A", "K"


def screen_lines(written: str) -> list[str]:
    """The lines that stay, without empty ones. Knows carriage return, cursor up and erase line; ignores colours."""
    rows = [""]
    row = column = 0
    for parameter, command, carriage_return, newline, text in CONTROL.findall(written):
        if command == UP:
            row = max(0, row - int(parameter or 1))
        elif command == ERASE_IN_LINE:
            rows[row] = ""
        elif carriage_return:
            column = 0
        elif newline:
            row, column = row + 1, 0
            rows += [""] * (row + 1 - len(rows))
        elif text:
            rows[row] = rows[row][:column].ljust(column) + text + rows[row][column + len(text) :]
            column += len(text)
    return [line.rstrip() for line in rows if line.strip()]
