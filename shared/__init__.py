"""What trainer and sidecar both know: the schema, the cells, the wire and the endpoint."""
