//! A server whose clock can be stepped, by libfaketime.

use crate::cluster::{Builder, Cluster};
use crate::setup::{self, Package};
use anyhow::{Context, Result};
use std::fs;
use std::path::{Path, PathBuf};

/// A server with a clock of its own.
pub struct Clocked {
    cluster: Cluster,
    file: PathBuf,
}

/// The package that it needs.
pub fn package() -> Package {
    Package::new("libfaketime", "/usr/lib/*-linux-gnu/faketime/libfaketime.so.1")
}

impl Clocked {
    /// Starts a server whose clock is right for now.
    pub fn start(builder: Builder, dir: &Path) -> Result<Clocked> {
        setup::ensure(&[package()])?;
        let library =
            library().context("libfaketime is installed, and its library is not there")?;
        let file = dir.join("clock");
        fs::write(&file, "+0\n")?;
        let cluster = builder
            .env("LD_PRELOAD", &library.to_string_lossy())
            .env("FAKETIME_TIMESTAMP_FILE", &file.to_string_lossy())
            .env("FAKETIME_NO_CACHE", "1")
            // Timeouts go on by the clock that nobody can step, as on a real machine.
            .env("FAKETIME_DONT_FAKE_MONOTONIC", "1")
            .env("DONT_FAKE_MONOTONIC", "1")
            .start()?;
        Ok(Clocked { cluster, file })
    }

    /// The server.
    pub fn cluster(&self) -> &Cluster {
        &self.cluster
    }

    /// Steps the clock to so many seconds from the right time.
    pub fn step(&self, seconds: i64) -> Result<()> {
        // Replaced as a whole: a server that looks meanwhile sees the old or the new one.
        let fresh = self.file.with_extension("new");
        fs::write(&fresh, format!("{seconds:+}\n"))?;
        fs::rename(&fresh, &self.file)?;
        Ok(())
    }
}

fn library() -> Option<PathBuf> {
    let lib = fs::read_dir("/usr/lib").ok()?;
    let places = lib.flatten().map(|entry| entry.path().join("faketime/libfaketime.so.1"));
    places.into_iter().find(|path| path.exists())
}
