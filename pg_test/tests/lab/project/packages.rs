//! The packages: what is in them, and that they install where there is no Rust.
//!
//! Quick tests pack the library that the other tests use; slow ones build it as it is released.

automod::dir!(pub "tests/lab/project/packages");

use pg_test::cluster::Builder;
use pg_test::extension::VERSION;
use pg_test::package::{checksums, Parts, Release};
use pg_test::prefix::Prefix;
use pg_test::process::output_of;
use pg_test::rundir::RunDir;
use pg_test::source_tree;
use pg_test::{ensure, lab_test, majors, Context, Lab, Result};
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

/// A directory of the run for a test's own files.
fn directory(lab: &Lab, name: &str) -> Result<PathBuf> {
    let path = lab.rundir().path().join(format!("packages-{name}"));
    fs::create_dir_all(&path)?;
    Ok(path)
}

/// A program that cargo installs, once for all runs.
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

/// The packages of the library that the lab has built: the Debian package and the tarball.
fn packed(lab: &Lab, output: &Path) -> Result<(PathBuf, PathBuf)> {
    let parts = Parts::new(this_release()?, lab.prefix().major(), lab.extension().clone());
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
    let mut tool = match package.extension().is_some_and(|end| end == "deb") {
        true => Command::new("dpkg-deb"),
        false => Command::new("tar"),
    };
    match package.extension().is_some_and(|end| end == "deb") {
        true => tool.arg("--extract").arg(package).arg(&to),
        false => tool.arg("--extract").arg("--file").arg(package).arg("--directory").arg(&to),
    };
    output_of(&mut tool)?;
    Ok(to)
}

/// The paths of the files below a directory.
fn files(root: &Path) -> Result<BTreeSet<String>> {
    let list = output_of(Command::new("find").args([".", "-type", "f"]).current_dir(root))?;
    Ok(list.lines().map(|path| path.trim_start_matches("./").to_owned()).collect())
}

fn copy_all(from: &Path, to: &Path) -> Result<()> {
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        fs::copy(entry.path(), to.join(entry.file_name()))?;
    }
    Ok(())
}

/// A PostgreSQL in a run directory of its own, to which nothing was added.
fn bare_prefix(lab: &Lab) -> Result<Prefix> {
    let rundir = Arc::new(RunDir::create(lab.rundir().program())?);
    let prefix = Prefix::copy(rundir, &majors::chosen()?)?;
    ensure!(installed(&prefix)?.is_empty(), "{:?}", installed(&prefix)?);
    Ok(prefix)
}

/// The files of the extension that a PostgreSQL has.
fn installed(prefix: &Prefix) -> Result<BTreeSet<String>> {
    let mut all = files(&prefix.lib_dir())?;
    all.append(&mut files(&prefix.extension_dir())?);
    all.retain(|path| path.contains("pg_fence"));
    Ok(all)
}

#[lab_test]
fn the_debian_package_unpacked_into_a_postgresql_runs_the_readme(lab: &Lab) -> Result<()> {
    let dir = directory(lab, "deb")?;
    let major = lab.prefix().major();
    let (package, _) = packed(lab, &dir)?;
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

    let prefix = bare_prefix(lab)?;
    let lib = root.join(format!("usr/lib/postgresql/{major}/lib"));
    let share = root.join(format!("usr/share/postgresql/{major}/extension"));
    copy_all(&lib, &prefix.lib_dir())?;
    copy_all(&share, &prefix.extension_dir())?;
    let cluster = Builder::new(Arc::new(prefix)).start()?;
    crate::project::pages::play("README.md", cluster.conninfo("postgres"))
}

fn operations_of_deb(lab: &Lab) -> String {
    format!("usr/share/doc/postgresql-{}-pg-fence/operations", lab.prefix().major())
}

#[lab_test]
fn the_tarball_has_the_same_files_and_its_checksum(lab: &Lab) -> Result<()> {
    let dir = directory(lab, "tarball")?;
    let output = directory(lab, "tarball-dist")?;
    let (package, tarball) = packed(lab, &output)?;
    let deb = unpacked(&package, dir.join("deb"))?;
    let tar = unpacked(&tarball, dir.join("tar"))?;
    let top =
        format!("pg_fence-{VERSION}-pg{}-linux-{}", lab.prefix().major(), std::env::consts::ARCH);
    let of_deb: BTreeSet<String> = files(&deb)?
        .iter()
        .filter(|path| path.contains("/postgresql/"))
        .filter_map(|path| Some(path.rsplit_once('/')?.1.to_owned()))
        .collect();
    let of_tar: BTreeSet<String> = files(&tar.join(&top))?
        .iter()
        .filter(|path| path.starts_with("lib/") || path.starts_with("share/extension/"))
        .filter_map(|path| Some(path.rsplit_once('/')?.1.to_owned()))
        .collect();
    ensure!(of_deb == of_tar, "{of_deb:?}, but {of_tar:?}");
    for (directory, operations) in
        [(&tar, format!("{top}/doc/operations")), (&deb, operations_of_deb(lab))]
    {
        for page in [
            "operations.md",
            "monitoring.md",
            "monitoring/queries.yaml",
            "monitoring/alerts.yaml",
            "monitoring/dashboard.json",
        ] {
            let packed = fs::read(directory.join(&operations).join(page))
                .with_context(|| page.to_owned())?;
            ensure!(
                packed == fs::read(source_tree::source_root().join("docs/operations").join(page))?,
                "{page}"
            );
        }
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
