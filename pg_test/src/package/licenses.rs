//! The licences: the project's own, and those of the crates linked into the library or into the command. They are
//! collected by hand: cargo-about would have to be built wherever a package is made or tested, and `cargo tree` and the
//! crates' own files say the same.

use crate::extension::{self, NAME};
use crate::process::output_of;
use crate::source_tree::{self, source_root};
use anyhow::{Context, Result, ensure};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

const C_LIBRARY: &str = "\
musl: MIT

Copyright © 2005-2020 Rich Felker, et al.
Source, with the text of the licence and all who wrote it: https://musl.libc.org
";

/// Reads a file of the source tree.
pub fn read(path: &str) -> Result<String> {
    fs::read_to_string(source_root().join(path)).with_context(|| path.to_owned())
}

/// A crate that is linked in.
struct Crate {
    name: String,
    license: String,
    /// The crate's source and authors, for crates without a licence file.
    origin: String,
    source: PathBuf,
}

/// Returns the notices required by the crates in the library, sorted by crate name.
pub fn third_party(major: &str) -> Result<String> {
    let features = format!("pg{major}");
    let of_build = ["--no-default-features", "--features", features.as_str()];
    // A candidate is built in another source tree, so its crates are read there.
    let cargo = extension::cargo_for(major)?;
    let manifest = cargo.get_current_dir().unwrap_or(source_root()).join("Cargo.toml");
    let manifest = manifest.to_string_lossy();
    notices_of(&format!("The library {NAME}.so"), &manifest, NAME, &of_build)
}

/// Returns the notices required by the crates in the command.
pub fn third_party_of_command() -> Result<String> {
    let manifest = "clients/rust/cli/Cargo.toml";
    let mut text = notices_of(&format!("The command {NAME}"), manifest, "pg-fence-cli", &[])?;
    // The packaged command also contains a C library.
    text.push_str(&format!("\n{}\n{C_LIBRARY}", "=".repeat(72)));
    Ok(text)
}

fn notices_of(what: &str, manifest: &str, package: &str, of_build: &[&str]) -> Result<String> {
    let mut text = format!("{what} contains these Rust crates.\n");
    for Crate { name, license, origin, source } in crates(manifest, package, of_build)? {
        text.push_str(&format!("\n{}\n{name}: {license}\n", "=".repeat(72)));
        let notices = notices(&source)?;
        if notices.is_empty() {
            text.push_str(&format!("\n{origin}\n"));
        }
        for (file, words) in notices {
            text.push_str(&format!("\n--- {file}\n\n{}\n", words.trim_end()));
        }
    }
    Ok(text)
}

fn crates(manifest: &str, package: &str, of_build: &[&str]) -> Result<Vec<Crate>> {
    let of_manifest = ["--locked", "--manifest-path", manifest];
    // Build scripts and procedural macros run only on the build machine.
    let tree = output_of(
        source_tree::cargo()
            .args(["tree", "--package", package, "--edges", "normal,no-proc-macro"])
            .args(of_manifest)
            .args(of_build)
            .args(["--prefix", "none", "--no-dedupe", "--format", "{p}|{l}"]),
    )?;
    let metadata =
        output_of(source_tree::cargo().args(["metadata", "--format-version=1"]).args(of_manifest))?;
    let metadata: serde_json::Value = serde_json::from_str(&metadata)?;
    let mut found = BTreeMap::new();
    for line in tree.lines() {
        let (package, license) = line.split_once('|').with_context(|| line.to_owned())?;
        let mut words = package.split_whitespace();
        let (name, version) = (words.next().unwrap_or(""), words.next().unwrap_or(""));
        // cargo prints the path only for the project's own crates.
        if words.next().is_some_and(|word| word.starts_with("(/")) {
            continue;
        }
        let version = version.trim_start_matches('v');
        let package = metadata["packages"]
            .as_array()
            .and_then(|all| all.iter().find(|p| p["name"] == name && p["version"] == version))
            .with_context(|| format!("cargo does not know {name} {version}"))?;
        let manifest = package["manifest_path"].as_str().context("a package has a manifest")?;
        let source = Path::new(manifest).parent().context("it lies in a directory")?.to_owned();
        let origin = origin(package);
        let name = format!("{name} {version}");
        found.insert(name.clone(), Crate { name, license: license.to_owned(), origin, source });
    }
    ensure!(found.len() > 5, "only {} crates were found", found.len());
    Ok(found.into_values().collect())
}

fn origin(package: &serde_json::Value) -> String {
    let authors = package["authors"].as_array().into_iter().flatten();
    let authors: Vec<&str> = authors.filter_map(serde_json::Value::as_str).collect();
    let repository = package["repository"].as_str().unwrap_or("an unnamed place");
    format!("Copyright: {}\nSource, with the text of the licence: {repository}", authors.join(", "))
}

/// Returns the licence files of a crate. If it offers a choice, the licence with the fewest notices is taken.
fn notices(source: &Path) -> Result<BTreeMap<String, String>> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(source)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let upper = name.to_uppercase();
        let is_notice = ["LICENSE", "LICENCE", "COPYING", "NOTICE", "COPYRIGHT"]
            .iter()
            .any(|word| upper.starts_with(word));
        if is_notice && entry.file_type()?.is_file() {
            found.insert(name, fs::read_to_string(entry.path())?);
        }
    }
    if found.keys().any(|name| name.to_uppercase().contains("MIT")) {
        found.retain(|name, _| !name.to_uppercase().contains("APACHE"));
    }
    Ok(found)
}
