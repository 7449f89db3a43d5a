"""What the server writes to stderr: a line for each request, as text or as JSON, and never a prompt or an answer."""

import json
import logging
import sys
from datetime import UTC, datetime

LEVELS = {
    "foretoken.serve": logging.INFO,
    "foretoken.cluster": logging.INFO,
    "uvicorn.error": logging.WARNING,  # it tells what goes wrong in HTTP
}


def log_signal(log: logging.Logger, at_once: bool) -> None:
    """Tell what a signal does. at_once: whether it is not the first one."""
    log.info("ends at once" if at_once else "drains: no new requests; a second signal ends at once")


class Text(logging.Formatter):
    """`foretoken: message key=value ..`, as the commands write their notices."""

    def format(self, record: logging.LogRecord) -> str:
        facts = getattr(record, "facts", {})
        line = " ".join([record.getMessage(), *(f"{name}={value}" for name, value in facts.items())])
        return f"foretoken: {line}" + (f"\n{self.formatException(record.exc_info)}" if record.exc_info else "")


class Json(logging.Formatter):
    """One JSON object a line: time, level, event, and what is known of a request."""

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {"time": moment, "level": record.levelname.lower(), "event": record.getMessage()}
        line |= getattr(record, "facts", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


FORMATS: dict[str, type[logging.Formatter]] = {"text": Text, "json": Json}


def log_to_stderr(form: str) -> None:
    """Set up the server's own loggers. form: of settings.LOGS."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(FORMATS[form]())
    for name, level in LEVELS.items():
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)
