//! The packages of the command: their contents, and that the command runs from them.

use pg_test::clients::command::fixture::program;
use pg_test::package::{Release, command};
use pg_test::process::output_of;
use pg_test::source_tree;
use pg_test::{Context, Harness, Result, ensure, extension, harness_test};
use std::path::{Path, PathBuf};
use std::process::Command;

fn runs(program: &Path) -> Result<()> {
    let version = output_of(Command::new(program).arg("--version"))?;
    ensure!(version == format!("pg_fence {}\n", extension::VERSION), "{version}");
    Ok(())
}

fn has(root: &Path, files: &[&str]) -> Result<()> {
    for file in files {
        let size = std::fs::metadata(root.join(file)).with_context(|| (*file).to_owned())?.len();
        ensure!(size > 100, "{file} has {size} bytes");
    }
    Ok(())
}

#[harness_test]
fn the_debian_package_and_the_tarball_have_it_all(harness: &Harness) -> Result<()> {
    let dir = harness.install_dir().new_dir("packages")?;
    // The packages' date is that of the commit, which a source tree without git does not have.
    let release = Release { version: extension::VERSION.to_owned(), epoch: 1_700_000_000 };
    // Building the packaged program takes minutes, so this test packs the one of the other tests; and so does
    // compressing what debuggers read of that.
    let packed = dir.join("pg_fence");
    output_of(Command::new("strip").arg("-o").arg(&packed).arg(program()?))?;
    let built = command::write(&packed, &release, &dir)?;
    let [deb, tar] = built.as_slice() else { pg_test::bail!("{built:?}") };
    let ending = |path: &PathBuf| path.file_name().map(|name| name.to_string_lossy().into_owned());
    ensure!(ending(deb).is_some_and(|name| name.starts_with("pg-fence_")), "{built:?}");

    let unpacked = dir.join("deb");
    output_of(Command::new("dpkg-deb").arg("-x").arg(deb).arg(&unpacked))?;
    runs(&unpacked.join("usr/bin/pg_fence"))?;
    has(
        &unpacked.join("usr/share"),
        &[
            "man/man1/pg_fence.1.gz",
            "man/man1/pg_fence-run.1.gz",
            "bash-completion/completions/pg_fence",
            "zsh/vendor-completions/_pg_fence",
            "fish/vendor_completions.d/pg_fence.fish",
            "doc/pg-fence/third-party-licenses.gz",
            "doc/pg-fence/copyright",
        ],
    )?;
    let field = |name: &str| output_of(Command::new("dpkg-deb").arg("-f").arg(deb).arg(name));
    let depends = field("Depends")?;
    ensure!(depends.contains("libc6") && !depends.contains("postgresql"), "{depends}");
    ensure!(field("Package")?.trim() == "pg-fence");

    let unpacked = dir.join("tar");
    std::fs::create_dir(&unpacked)?;
    output_of(Command::new("tar").arg("-xzf").arg(tar).arg("-C").arg(&unpacked))?;
    let name = ending(tar).context("no name")?;
    let top = unpacked.join(name.trim_end_matches(".tar.gz"));
    runs(&top.join("bin/pg_fence"))?;
    has(&top, &["README.md", "LICENSE", "THIRD-PARTY-LICENSES", "share/man/man1/pg_fence.1"])?;
    let recipe = std::fs::read_to_string(top.join("Containerfile"))?;
    ensure!(recipe.contains("COPY bin/pg_fence "), "{recipe}");
    Ok(())
}

/// The largest sizes allowed, in bytes: of the program, and of its Debian package.
const LARGEST: u64 = 2_500_000;
const LARGEST_PACKAGE: u64 = 1_900_000;

/// Alone in an empty root directory, the packaged program resolves names and finds a service, a password and a
/// certificate.
#[harness_test(slow)]
fn the_program_of_the_packages_is_linked_with_nothing_and_runs_alone(
    harness: &Harness,
) -> Result<()> {
    let built = command::build(source_tree::source_root(), &pg_test::package::directory())?;
    runs(&built)?;
    let linked = Command::new("ldd").arg(&built).output()?;
    let said = String::from_utf8_lossy(&[linked.stdout, linked.stderr].concat()).into_owned();
    ensure!(said.contains("statically linked") || said.contains("not a dynamic"), "{said}");
    let release = Release { version: extension::VERSION.to_owned(), epoch: 1_700_000_000 };
    let packages = command::write(&built, &release, &harness.install_dir().new_dir("packages")?)?;
    let size = |path: &PathBuf| std::fs::metadata(path).map(|file| file.len());
    let (size, packed) = (size(&built)?, size(&packages[0])?);
    eprintln!("the program has {size} bytes, its package {packed}");
    ensure!(size <= LARGEST && packed <= LARGEST_PACKAGE, "{size} bytes, packed {packed}");
    super::connections::in_an_empty_root(harness, &built)
}
