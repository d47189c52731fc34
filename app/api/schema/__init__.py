"""The request bodies of each dialect, as structs: fields, limits and descriptions in one place.

Knows: JSON, msgspec, the fields of each dialect. Must not know: generation, response formats. The
modules of each dialect convert the structs to the requests of app/core/requests.py.

To add a request field, add it to the struct of its body, with a description. Its limits are checked
by the decoder, and openapi.yaml is generated from it (`make openapi`).
"""
