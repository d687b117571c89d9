"""Results that notebooks display. `show` is imported only when a notebook displays one."""


class ShowsItself:
    """A result that a notebook displays as a page in a frame."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        from .show.page import show

        return show(self)._repr_html_()
