"""Structs of the shared fields of a body that is not decoded to a struct as a whole.

Knows: the readers of app/api/fields.py. Must not know: the fields of any dialect.
"""

from collections.abc import Iterable

from app.api.fields import Fields
from app.api.schema.decode import Body, BodyDecoder


def decode_fields(fields: Fields, decoder: BodyDecoder[Body], names: Iterable[str]) -> Body:
    """Returns a struct with the fields of these names; all others are absent. Raises
    AppError(INVALID)."""
    values = {name: value for name in names if (value := fields.value(name)) is not None}
    return decoder.decode_values(values)
