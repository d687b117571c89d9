"""Calling code that is not ours: within a time limit, and off the event loop where it may block."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import inspect
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeVar

Returned = TypeVar("Returned")


class TooLong(Exception):  # noqa: N818
    """A tool, a simulated user or a reward took longer than it may."""


async def within(work: Awaitable[Returned], limit: float | None, who: str) -> Returned:
    """What some work returns, if it takes no more seconds than the limit; else `TooLong`.

    Work that ends as if it were cancelled although nobody cancels the task that waits for it (it waited for something
    that was), or that wants to end the process, is a RuntimeError like any other failure.
    """
    task = asyncio.current_task()
    before = 0 if task is None else task.cancelling()
    try:
        async with asyncio.timeout(limit) as timeout:
            return await work
    except TimeoutError as error:
        if not timeout.expired():  # the work's own
            raise
        raise TooLong(f"{who} took longer than {limit:g} s") from error
    except asyncio.CancelledError as error:
        if task is None or task.cancelling() > before:  # somebody ends this task
            raise
        raise RuntimeError(f"{who} was cancelled") from error
    except (Exception, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # SystemExit: a tool does not end the run
        raise _harmless(error) from error


async def together(work: Iterable[Coroutine[Any, Any, Returned]]) -> list[Returned]:
    """What coroutines return that are run at once. Where one raises, the others are cancelled, and that is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in work]
    except ExceptionGroup as failed:  # the first is why, the others are the same again
        raise failed.exceptions[0] from failed
    return [task.result() for task in tasks]


async def noted(step: Callable[[], Awaitable[Any]], limit: float | None, who: str, notes: list[str]) -> None:
    """Take the last step of a tool or a simulated user: what goes wrong is put among the notes, not raised."""
    try:
        await within(step(), limit, who)
    except TooLong as error:
        notes.append(str(error))
    except Exception as error:
        notes.append(f"{who}: {words_of(error)}")


def words_of(error: BaseException) -> str:
    """An error in words: of which kind it is, and what it says."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _harmless(error: BaseException) -> RuntimeError:
    """What ends a process or a task, as an error that does not."""
    return RuntimeError(words_of(error))


async def called(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """What a function returns: a coroutine function is awaited, a plain one runs in a thread of its own."""
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None)):  # noqa: B004
        return await function(*args, **kwargs)
    found = await in_thread(functools.partial(function, *args, **kwargs))
    return await found if isinstance(found, Awaitable) else found


async def in_thread(call: Callable[[], Any]) -> Any:
    """Call a function in a thread of its own: one that hangs holds up neither other calls nor the end of the process,
    as it would in the few threads that the event loop shares."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[tuple[Any, Exception | None]] = loop.create_future()

    def deliver(answer: Any, error: Exception | None) -> None:
        if not future.done():
            future.set_result((answer, error))

    def work() -> None:
        answer, error = None, None
        try:
            answer = call()
        except Exception as raised:
            error = raised
        except BaseException as raised:
            error = _harmless(raised)
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(deliver, answer, error)

    threading.Thread(target=contextvars.copy_context().run, args=(work,), name="tokentrace-tool", daemon=True).start()
    answer, error = await future
    if error is not None:
        raise error
    return answer


def takes(function: Callable[..., Any], name: str) -> bool:
    """Whether a function can be given an argument by this name. One whose signature cannot be read takes anything."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return True
    found = parameters.get(name)
    if found is not None and found.kind is not found.POSITIONAL_ONLY:
        return found.kind is not found.VAR_POSITIONAL
    return any(one.kind is one.VAR_KEYWORD for one in parameters.values())
