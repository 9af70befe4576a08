# For `pgxn install` and for those who expect make; cargo does the work.
PG_CONFIG ?= pg_config
READY = target/make

all:
	cargo run --quiet -- install --pg-config "$$(command -v $(PG_CONFIG))" --destdir $(READY)

# Apart from `all`, for who may write into PostgreSQL's directories often has no Rust.
install:
	cp -R $(READY)/. "$(DESTDIR)/"

clean:
	rm -rf $(READY)

.PHONY: all install clean
