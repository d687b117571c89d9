"""Call user code: within a time limit, and in a thread if it may block."""

import asyncio
import contextlib
import contextvars
import inspect
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeVar

from ..errors import InputError, TokentraceError

Returned = TypeVar("Returned")


class TooLong(InputError):  # noqa: N818
    """A tool, a simulated user or a reward took too long."""


async def within(work: Awaitable[Returned], limit: float | None, who: str) -> Returned:
    """Await work. Raises TooLong after `limit` seconds."""
    task = asyncio.current_task()
    before = 0 if task is None else task.cancelling()
    try:
        async with asyncio.timeout(limit) as timeout:
            return await work
    except TimeoutError as error:
        if not timeout.expired():  # the work raised it
            raise
        raise TooLong(f"{who} took longer than {limit:g} s") from error
    except asyncio.CancelledError as error:
        if task is None or task.cancelling() > before:  # someone cancelled this task
            raise
        raise RuntimeError(f"{who} was cancelled") from error
    except (Exception, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # SystemExit
        raise RuntimeError(describe_error(error)) from error


async def together(work: Iterable[Coroutine[Any, Any, Returned]]) -> list[Returned]:
    """Run coroutines concurrently. If one raises, cancels the others."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in work]
    except ExceptionGroup as failed:  # the others repeat the first
        raise failed.exceptions[0] from failed
    return [task.result() for task in tasks if not task.cancelled()]


async def noted(
    step: Callable[[], Awaitable[Any]], limit: float | None, who: str, notes: list[str]
) -> None:
    """Run the last step of a tool or a user. A failure becomes a note."""
    try:
        await within(step(), limit, who)
    except Exception as error:
        notes.append(str(error) if isinstance(error, TooLong) else f"{who}: {describe_error(error)}")


def describe_error(error: BaseException) -> str:
    """An error's message, after its type unless it is a TokentraceError."""
    kind = "" if isinstance(error, TokentraceError) else type(error).__name__
    return ": ".join(filter(None, [kind, str(error)]))


async def called(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Await a coroutine function, or run a plain one in its own thread."""
    call = getattr(function, "__call__", None)  # noqa: B004
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call):
        return await function(*args, **kwargs)
    loop = asyncio.get_running_loop()
    future: asyncio.Future[tuple[Any, Exception | None]] = loop.create_future()

    def work() -> None:
        answer, error = None, None
        try:
            answer = function(*args, **kwargs)
        except Exception as raised:
            error = raised
        except BaseException as raised:  # SystemExit
            error = RuntimeError(describe_error(raised))
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(lambda: None if future.done() else future.set_result((answer, error)))

    run = contextvars.copy_context().run
    threading.Thread(target=run, args=(work,), name="tokentrace-tool", daemon=True).start()
    answer, error = await future
    if error is not None:
        raise error
    return await answer if isinstance(answer, Awaitable) else answer


def takes(function: Callable[..., Any], name: str) -> bool:
    """True if a function takes this argument, or its signature cannot be read."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return True
    named = parameters[name].kind if name in parameters else None
    by_name = named in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return by_name or any(one.kind is one.VAR_KEYWORD for one in parameters.values())
