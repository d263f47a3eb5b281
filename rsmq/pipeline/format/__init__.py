"""The data source `format("rsmq")`: options, offsets, columns, readers and writers."""
