//! The released packages: whether they depend on where they are built, and what Debian's lintian reports; the directory
//! in which PostgreSQL 18 finds the extension; and what cargo-pgrx makes of the same source.

use super::{directory, files, this_release, unpacked};
use pg_test::cluster::Builder;
use pg_test::extension::{Extension, VERSION};
use pg_test::install_dir::InstallDir;
use pg_test::package::{self, Parts, checksums, library};
use pg_test::process::output_of;
use pg_test::rundir::RunDir;
use pg_test::setup::{self, Package};
use pg_test::skipped::left_out;
use pg_test::source_tree::{self, source_root, target_dir};
use pg_test::{
    Context, Harness, Result, bail, ensure, extension, harness_test, majors, release_candidate,
};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

/// Returns the released library, built once.
pub fn released_library() -> Result<PathBuf> {
    library::build(source_root(), &packaged()?, &package::directory())
}

/// Returns the `pg_config` of the version under test, if packages are made for it.
fn packaged() -> Result<PathBuf> {
    let pg_config = majors::chosen()?.pg_config;
    match release_candidate::builds(&extension::major_of(&pg_config)?) {
        true => left_out("packages are built with the pgrx that Cargo.toml names"),
        false => Ok(pg_config),
    }
}

/// Returns the released Debian package.
pub fn released_package(output: &Path) -> Result<PathBuf> {
    let major = extension::major_of(&majors::chosen()?.pg_config)?;
    let parts = Parts::new(this_release()?, &major, Extension::around(released_library()?)?);
    let mut written = parts.write(output)?.into_iter();
    written.find(|path| path.extension().is_some_and(|end| end == "deb")).context("no .deb")
}

/// Copies the files that git tracks, as they are in the working tree.
fn source_elsewhere(to: &Path) -> Result<()> {
    fs::create_dir_all(to)?;
    let list = output_of(Command::new("git").args(["ls-files"]).current_dir(source_root()))?;
    let list: Vec<&str> = list.lines().filter(|path| source_root().join(path).exists()).collect();
    let mut copy = Command::new("cp");
    copy.args(["--parents", "--target-directory"]).arg(to).args(list).current_dir(source_root());
    output_of(&mut copy).map(drop)
}

#[harness_test(slow)]
fn built_in_another_directory_they_are_the_same_bytes(harness: &Harness) -> Result<()> {
    let release = this_release()?;
    let pg_config = packaged()?;
    let dir = directory(harness, "elsewhere")?;
    source_elsewhere(&dir.join("a/b c"))?;
    let other = library::build(&dir.join("a/b c"), &pg_config, &dir.join("target"))?;
    let sums = |name: &str, library: PathBuf| -> Result<String> {
        let output = dir.join(name);
        fs::create_dir_all(&output)?;
        let parts =
            Parts::new(release.clone(), harness.install_dir().major(), Extension::around(library)?);
        parts.write(&output)?;
        checksums(&output)
    };
    let (here, there) = (sums("here", released_library()?)?, sums("there", other)?);
    ensure!(here == there && here.lines().count() == 2, "{here}{there}");
    // Both builds use the same directory with the crates of others.
    let (library, home) = (fs::read(released_library()?)?, std::env::var("HOME")? + "/");
    let found = library.windows(home.len()).any(|bytes| bytes == home.as_bytes());
    ensure!(home.len() < 3 || !found, "{home} is in it");
    Ok(())
}

#[harness_test(slow)]
fn debians_checker_finds_nothing_that_is_not_explained(harness: &Harness) -> Result<()> {
    setup::ensure(&[Package::new("lintian", "/usr/bin/lintian")])?;
    let package = released_package(&directory(harness, "lintian")?)?;
    let mut lintian = Command::new("lintian");
    lintian.args(["--fail-on", "error,warning", "--display-info", "--allow-root"]);
    // lintian takes bytes of machine code for misspelt words.
    lintian.args(["--suppress-tags", "spelling-error-in-binary"]).arg(&package);
    let said = output_of(&mut lintian)?;
    ensure!(said.trim().is_empty(), "{said}");
    Ok(())
}

#[harness_test(slow)]
fn postgresql_18_finds_it_in_a_side_folder(harness: &Harness) -> Result<()> {
    let rundir = Arc::new(RunDir::create(harness.rundir().program())?);
    let installation = majors::of(majors::NEWEST)?;
    let extension = Extension::build(&installation)?;
    let install_dir = InstallDir::copy(rundir, &installation)?;
    let dir = directory(harness, "side")?;
    let parts = Parts::new(this_release()?, majors::NEWEST, extension);
    let written = parts.write(&dir)?;
    let tarball = written.iter().find(|path| path.to_string_lossy().ends_with(".tar.gz"));
    let unpacked = unpacked(tarball.context("no tarball")?, dir.join("tar"))?;
    let side = fs::read_dir(&unpacked)?.next().context("an empty tarball")??.path();
    let (share, lib) = (side.join("share"), side.join("lib"));

    // The files that the Containerfile copies exist.
    let containerfile = fs::read_to_string(side.join("Containerfile"))?;
    ensure!(containerfile == "FROM scratch\nCOPY lib /lib\nCOPY share /share\n", "{containerfile}");

    let install_dir = Arc::new(install_dir);
    let without = Builder::new(install_dir.clone()).start()?;
    let refused = without.connect("postgres")?.try_rows("CREATE EXTENSION pg_fence");
    ensure!(refused.is_err(), "it was there already");
    let cluster = Builder::new(install_dir)
        .set("extension_control_path", &format!("{}:$system", share.display()))
        .set("dynamic_library_path", &format!("{}:$libdir", lib.display()))
        .start()?;
    crate::project::pages::play("README.md", cluster.conninfo("postgres"))
}

#[harness_test(slow)]
fn cargo_pgrx_makes_the_same_files(harness: &Harness) -> Result<()> {
    let dir = directory(harness, "pgrx")?;
    let major = harness.install_dir().major();
    let pg_config = packaged()?;
    let mut command = source_tree::cargo();
    let path = std::env::var("PATH").unwrap_or_default();
    // It must be the version of pgrx that builds the extension.
    let cargo_pgrx = super::cargo_installs("cargo-pgrx", "0.18.1")?;
    let tools = cargo_pgrx.parent().context("no directory")?;
    command.env("PATH", format!("{}:{path}", tools.display()));
    command.args(["pgrx", "package", "--package", "pg_fence", "--no-default-features"]);
    command.args(["--features", &format!("pg{major}"), "--pg-config"]).arg(&pg_config);
    output_of(
        command.arg("--out-dir").arg(&dir).env("CARGO_TARGET_DIR", target_dir().join("pgrx")),
    )?;

    let made = files(&dir)?;
    let place = |end: &str| match made.iter().find(|path| path.ends_with(end)) {
        Some(path) => Ok(dir.join(path)),
        None => bail!("no {end} in {made:?}"),
    };
    let mut updates = extension::scripts()?;
    updates.retain(|name, _| name.matches("--").count() == 2);
    for (name, text) in &updates {
        ensure!(fs::read_to_string(place(name)?)? == *text, "{name}");
    }
    ensure!(made.len() == 3 + updates.len(), "{made:?}");
    let script = format!("pg_fence--{VERSION}.sql");
    let (library, control, script) =
        (place("pg_fence.so")?, place("pg_fence.control")?, place(&script)?);
    ensure!(fs::read(control)? == fs::read(source_root().join("pg_fence.control"))?);
    let ours = fs::read_to_string(
        harness.install_dir().extension_dir().join(script.file_name().context("no name")?),
    )?;
    // pgrx adds a comment with its source before each part, and pg_fence a line that keeps psql from loading the file.
    let statements = |text: &str| -> String {
        let mut in_comment = false;
        let mut is_statement = |line: &str| {
            in_comment |= line.starts_with("/*");
            let is_comment = in_comment || line.starts_with("--") || line.starts_with("\\echo");
            in_comment &= !line.trim_end().ends_with("*/");
            !is_comment && !line.trim().is_empty()
        };
        text.lines().filter(|line| is_statement(line)).collect::<Vec<_>>().join("\n")
    };
    let (theirs, ours) = (statements(&fs::read_to_string(script)?), statements(&ours));
    let differs = theirs.lines().zip(ours.lines()).find(|(theirs, ours)| theirs != ours);
    ensure!(theirs == ours, "other statements: {differs:?}");
    let symbols = |library: &Path| -> Result<String> {
        let text =
            output_of(Command::new("nm").args(["--dynamic", "--defined-only"]).arg(library))?;
        let names = text.lines().filter_map(|line| line.rsplit(' ').next());
        Ok(names.filter(|name| !name.starts_with("__pgrx")).collect::<Vec<_>>().join("\n"))
    };
    ensure!(symbols(&library)? == symbols(&harness.install_dir().lib_dir().join("pg_fence.so"))?);
    Ok(())
}
