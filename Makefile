# For `pgxn install` and for those who expect make; cargo does the work.
PG_CONFIG ?= pg_config
READY = target/make

all:
	cargo run --quiet -- install --pg-config "$$(command -v $(PG_CONFIG))" --destdir $(READY)

# Apart from `all`, for who may write into PostgreSQL's directories often has no Rust. Each file is put beside the old
# one and then given its name: a library that is overwritten crashes the sessions that have it loaded.
export DESTDIR READY
install:
	find "$(READY)" -type f -exec sh -euc 'for file; do to="$$DESTDIR/$${file#"$$READY/"}"; \
	    mkdir -p "$${to%/*}"; cp --preserve=mode "$$file" "$$to.new"; mv -f "$$to.new" "$$to"; done' install {} +

clean:
	rm -rf $(READY)

.PHONY: all install clean
