"""gRPC faces. Generated wire types live in pb and go no deeper than this package."""
