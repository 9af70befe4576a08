//! The client's log, for people: on the standard error, a line each.

use crate::say;
use log::{LevelFilter, Log, Metadata, Record};

struct Logger;

impl Log for Logger {
    fn enabled(&self, metadata: &Metadata) -> bool {
        metadata.target().starts_with("pg_fence")
    }

    fn log(&self, record: &Record) {
        if self.enabled(record.metadata()) {
            say(&record.args().to_string());
        }
    }

    fn flush(&self) {}
}

/// From now on warnings are said.
pub fn start() {
    // It is the only logger, so that there cannot be another.
    if log::set_logger(&Logger).is_ok() {
        log::set_max_level(LevelFilter::Warn);
    }
}
