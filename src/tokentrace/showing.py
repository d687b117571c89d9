"""Results that notebooks display. `show` is imported when a notebook asks for it."""


class ShowsItself:
    """A result that a notebook displays as a page in a frame."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        from .show.page import show

        return show(self)._repr_html_()
