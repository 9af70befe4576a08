//! The packages: their contents, and that they install where there is no Rust.
//!
//! Quick tests pack the library of the other tests; slow tests build the released one.

automod::dir!(pub "tests/suite/project/packages");

use pg_test::cluster::Builder;
use pg_test::extension::VERSION;
use pg_test::install_dir::InstallDir;
use pg_test::package::{Parts, Release, checksums};
use pg_test::process::output_of;
use pg_test::rundir::RunDir;
use pg_test::source_tree;
use pg_test::{Context, Harness, Result, ensure, harness_test, majors};
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

/// Returns a directory of the run for a test's own files.
fn directory(harness: &Harness, name: &str) -> Result<PathBuf> {
    let path = harness.rundir().path().join(format!("packages-{name}"));
    fs::create_dir_all(&path)?;
    Ok(path)
}

/// Installs a program with cargo, once for all runs.
fn cargo_installs(name: &str, version: &str) -> Result<PathBuf> {
    let root = source_tree::target_dir().join("tools");
    let program = root.join("bin").join(name);
    if !program.exists() {
        let mut cargo = source_tree::cargo();
        cargo.args(["install", name, "--version", version, "--locked", "--root"]).arg(&root);
        output_of(cargo.env_remove("CARGO_TARGET_DIR"))?;
    }
    Ok(program)
}

fn this_release() -> Result<Release> {
    Release::of_commit(source_tree::source_root())
}

/// Packs the library under test: returns the Debian package and the tarball.
fn packed(harness: &Harness, output: &Path) -> Result<(PathBuf, PathBuf)> {
    let parts =
        Parts::new(this_release()?, harness.install_dir().major(), harness.extension().clone());
    let written = parts.write(output)?;
    let named = |end: &str| {
        let found = written.iter().find(|path| path.to_string_lossy().ends_with(end));
        found.cloned().with_context(|| format!("no {end} in {written:?}"))
    };
    Ok((named(".deb")?, named(".tar.gz")?))
}

/// Unpacks a package's files below `to`.
fn unpacked(package: &Path, to: PathBuf) -> Result<PathBuf> {
    fs::create_dir_all(&to)?;
    let unpack = match package.extension().is_some_and(|end| end == "deb") {
        true => "dpkg-deb --extract \"$0\" \"$1\"",
        false => "tar --extract --file \"$0\" --directory \"$1\"",
    };
    output_of(Command::new("sh").args(["-c", unpack]).arg(package).arg(&to))?;
    Ok(to)
}

/// Returns the paths of the files below a directory.
fn files(root: &Path) -> Result<BTreeSet<String>> {
    let list = output_of(Command::new("find").args([".", "-type", "f"]).current_dir(root))?;
    Ok(list.lines().map(|path| path.trim_start_matches("./").to_owned()).collect())
}

/// Returns an unmodified PostgreSQL in its own run directory.
fn bare_install_dir(harness: &Harness) -> Result<InstallDir> {
    let rundir = Arc::new(RunDir::create(harness.rundir().program())?);
    let install_dir = InstallDir::copy(rundir, &majors::chosen()?)?;
    ensure!(installed(&install_dir)?.is_empty(), "{:?}", installed(&install_dir)?);
    Ok(install_dir)
}

/// Returns the files of the extension in a PostgreSQL.
fn installed(install_dir: &InstallDir) -> Result<BTreeSet<String>> {
    let mut all = files(&install_dir.lib_dir())?;
    all.append(&mut files(&install_dir.extension_dir())?);
    all.retain(|path| path.contains("pg_fence"));
    Ok(all)
}

#[harness_test]
fn the_debian_package_unpacked_into_a_postgresql_runs_the_readme(harness: &Harness) -> Result<()> {
    let dir = directory(harness, "deb")?;
    let major = harness.install_dir().major();
    let (package, _) = packed(harness, &dir)?;
    let name = package.file_name().unwrap_or_default().to_string_lossy().into_owned();
    ensure!(name.starts_with(&format!("postgresql-{major}-pg-fence_{VERSION}-1_")), "{name}");

    let depends = output_of(Command::new("dpkg-deb").arg("--field").arg(&package).arg("Depends"))?;
    ensure!(depends.starts_with(&format!("postgresql-{major}, libc6 (>= 2.")), "{depends}");

    let root = unpacked(&package, dir.join("root"))?;
    let sums = output_of(Command::new("dpkg-deb").arg("--info").arg(&package).arg("md5sums"))?;
    let listed: BTreeSet<String> =
        sums.lines().filter_map(|line| Some(line.split_once("  ")?.1.to_owned())).collect();
    ensure!(listed == files(&root)?, "the sums are of {listed:?}");
    fs::write(dir.join("sums"), sums)?;
    output_of(Command::new("md5sum").arg("--check").arg(dir.join("sums")).current_dir(&root))?;

    let install_dir = bare_install_dir(harness)?;
    for (from, to) in [
        (format!("usr/lib/postgresql/{major}/lib/."), install_dir.lib_dir()),
        (format!("usr/share/postgresql/{major}/extension/."), install_dir.extension_dir()),
    ] {
        output_of(Command::new("cp").arg("-r").arg(root.join(from)).arg(to))?;
    }
    let cluster = Builder::new(Arc::new(install_dir)).start()?;
    crate::project::pages::play("README.md", cluster.conninfo("postgres"))
}

#[harness_test]
fn the_tarball_has_the_same_files_and_its_checksum(harness: &Harness) -> Result<()> {
    let dir = directory(harness, "tarball")?;
    let output = directory(harness, "tarball-dist")?;
    let (package, tarball) = packed(harness, &output)?;
    let deb = unpacked(&package, dir.join("deb"))?;
    let tar = unpacked(&tarball, dir.join("tar"))?;
    let major = harness.install_dir().major();
    let top = format!("pg_fence-{VERSION}-pg{major}-linux-{}", std::env::consts::ARCH);
    let names = |root: &Path, is_ours: fn(&str) -> bool| -> Result<BTreeSet<String>> {
        let ours = files(root)?.into_iter().filter(|path| is_ours(path));
        Ok(ours.filter_map(|path| Some(path.rsplit_once('/')?.1.to_owned())).collect())
    };
    let of_deb = names(&deb, |path| path.contains("/postgresql/"))?;
    let is_ours = |path: &str| path.starts_with("lib/") || path.starts_with("share/extension/");
    let of_tar = names(&tar.join(&top), is_ours)?;
    ensure!(of_deb == of_tar, "{of_deb:?}, but {of_tar:?}");
    let pages = source_tree::source_root().join("docs/operations");
    for operations in [
        tar.join(&top).join("doc/operations"),
        deb.join(format!("usr/share/doc/postgresql-{major}-pg-fence/operations")),
    ] {
        output_of(Command::new("diff").arg("-r").arg(operations).arg(&pages))?;
    }
    ensure!(of_tar.contains("pg_fence.so") && of_tar.contains("pg_fence.control"), "{of_tar:?}");
    let notices = fs::read_to_string(tar.join(&top).join("THIRD-PARTY-LICENSES"))?;
    for (name, words) in [
        ("pgrx 0.", "https://github.com/pgcentralfoundation/pgrx"),
        ("serde_json 1.", "Permission is hereby granted"),
        ("once_cell 1.", "Permission is hereby granted"),
    ] {
        let (_, after) = notices.split_once(&format!("\n{name}")).context(name)?;
        let of_crate = after.split("=====").next().unwrap_or_default();
        ensure!(of_crate.contains(words), "{name}: {of_crate}");
    }

    checksums(&output)?;
    let mut check = Command::new("sha256sum");
    output_of(check.args(["--check", "SHA256SUMS"]).current_dir(&output)).map(drop)
}
