"""Registries: references, credentials, mirrors, and the HTTP rules of pulling ranges."""
