"""Text that others wrote, made fit for a terminal."""


def printable(text: str) -> str:
    """Write out, as in a Python string, what is not seen: line ends, control codes, half a pair.

    A file can hold any text; printed as it is, it could clear the screen or forge a line.
    """
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
