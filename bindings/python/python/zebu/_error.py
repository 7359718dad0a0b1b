"""The exception of the package."""


class Error(OSError):
    """A request or a job that failed.

    ``errno``, ``strerror`` and ``filename`` are those of ``OSError``. ``offset`` is a place on the disk, ``file_offset`` one
    in the image file, where they are known. ``kind`` is a word that stays as it is. If ``retryable``, the same request may
    succeed once others have done something.
    """

    def __init__(
        self, errno, message, filename=None, *, kind="io", offset=None, file_offset=None, retryable=False
    ):
        if filename is None:
            super().__init__(errno, message)
        else:
            super().__init__(errno, message, filename)
        self.kind = kind
        self.offset = offset
        self.file_offset = file_offset
        self.retryable = retryable

    def __str__(self):
        text = super().__str__()
        if self.offset is not None:
            text += f" (disk offset {self.offset})"
        if self.file_offset is not None:
            text += f" (file offset {self.file_offset})"
        return text
