"""What the server writes to stderr: a line for each request, as text or as JSON, and never a prompt or an answer."""

import json
import logging
import sys
from asyncio import CancelledError
from datetime import UTC, datetime

LEVELS = {
    "foretoken.serve": logging.INFO,
    "foretoken.cluster": logging.INFO,
    "uvicorn.error": logging.WARNING,  # reports what goes wrong in HTTP
}
LISTENS = "listens on %s (base URL of OpenAI clients: %s/v1)"
DRAINS, ENDS = (
    "drains: no new requests; a second signal ends at once",
    "ends at once",
)  # at the first signal, the second


class Text(logging.Formatter):
    """Formats a line as `foretoken: message key=value ..`, as the commands write their notices."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line for a log record, with its `facts` if it has any. record: of the standard library."""
        facts = getattr(record, "facts", {})
        line = " ".join([record.getMessage(), *(f"{name}={value}" for name, value in facts.items())])
        return f"foretoken: {line}" + (f"\n{self.formatException(record.exc_info)}" if record.exc_info else "")


class Json(logging.Formatter):
    """Formats each record as one JSON object: time, level, event, and the facts of a request."""

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {"time": moment, "level": record.levelname.lower(), "event": record.getMessage()}
        line |= getattr(record, "facts", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def of_no_cancelling(record: logging.LogRecord) -> bool:
    """Whether a log record is not of uvicorn's tracebacks of what is cancelled as the server ends."""
    cancelled = record.exc_info is not None and record.exc_info[0] is CancelledError
    return not cancelled and CancelledError.__name__ not in record.getMessage()


def log_to_stderr(form: str) -> None:
    """Have the server's loggers write to stderr. form: "text" or "json", as in settings.LOGS."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Json() if form == "json" else Text())
    for name, level in LEVELS.items():
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)
    logging.getLogger("uvicorn.error").addFilter(of_no_cancelling)
