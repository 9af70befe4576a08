//! The clients by language: how each is built, checked and started. A new language is a file beside `python.rs` and a
//! line in [`ALL`].

mod go;
pub mod java;
mod python;
pub mod rust;
pub mod typescript;

use crate::harness::Harness;
use crate::markdown;
use crate::process::output_of;
use crate::runtime::{self, Runtime};
use crate::source_tree::{source_root, target_dir, without_package};
use anyhow::{Result, ensure};
use std::ffi::OsString;
use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Mutex;

/// A client or a variant of it: on another driver, or asynchronous. `clients/new-language.md` says what each part is.
///
/// Its commands are run by the shell in its directory. They write only into its target directory, `$OUT`.
#[derive(Debug, Clone, Copy)]
pub struct Language {
    pub name: &'static str,
    pub directory: &'static str,
    pub is_there: fn() -> bool,
    pub bring: fn() -> Result<Variables>,
    pub build: &'static str,
    pub worker: &'static str,
    pub first_worker: (&'static str, &'static str),
    pub tests: &'static str,
    pub tools: &'static [Runtime],
    pub checks: &'static [&'static str],
    pub page: Option<Page>,
}

/// Environment variables.
pub type Variables = Vec<(&'static str, OsString)>;

/// How the examples in a README become a program.
#[derive(Debug, Clone, Copy)]
pub struct Page {
    /// The mark of their blocks, and the number of the first ones that are files of their own.
    pub mark: &'static str,
    pub but: usize,
    /// The program, in `$OUT/page`, and what it has before and after all examples, and each.
    pub file: &'static str,
    pub program: [&'static str; 2],
    pub example: [&'static str; 2],
}

/// All clients.
pub const ALL: &[Language] = &[
    python::LANGUAGE,
    python::ASYNCIO,
    python::ASYNCIO_ON_LIBPQ,
    typescript::ON_PG,
    typescript::ON_POSTGRES,
    java::LANGUAGE,
    java::ON_25,
    go::LANGUAGE,
    rust::LANGUAGE,
];

/// The directory of a client in the target directory.
pub fn out(directory: &str) -> PathBuf {
    target_dir().join("clients").join(directory)
}

impl Language {
    pub fn source(&self) -> PathBuf {
        source_root().join("clients").join(self.directory)
    }

    /// Brings what is missing, and builds the programs.
    pub fn prepare(&self) -> Result<Client> {
        // Tests run concurrently.
        static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
        let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(|e| e.into_inner());
        let out = out(self.directory);
        fs::create_dir_all(&out)?;
        let mut variables = vec![("OUT", out.into())];
        variables.extend((self.bring)()?);
        let client = Client { language: *self, variables };
        if !self.build.is_empty() {
            // The vectors that tests play are beside the client.
            let build = format!(
                "sources=$(find . ../spec -type f | sort | xargs -d '\\n' sha256sum)
                 test \"$sources\" = \"$(cat $OUT/built)\" && exit
                 {}
                 echo $sources > $OUT/built",
                self.build
            );
            output_of(&mut client.shell(Command::new("sh"), &build))?;
        }
        Ok(client)
    }
}

/// A client that is ready to be run.
pub struct Client {
    pub language: Language,
    variables: Variables,
}

impl Client {
    fn shell(&self, mut shell: Command, commands: &str) -> Command {
        without_package(&mut shell).current_dir(self.language.source());
        // The shell does not split the values of variables into words.
        shell.args(["-ec", &format!("IFS=\n{commands}"), "sh"]);
        shell.envs(self.variables.iter().cloned());
        shell
    }

    /// A command for one of its programs, which ends with the run at the latest. Its arguments may be added.
    pub fn program(&self, harness: &Harness, program: &str) -> Command {
        self.shell(harness.rundir().command("sh"), &format!("exec {program} \"$@\""))
    }

    /// Runs all checks of its source and its package. The error has the output of those that find something. They find
    /// their tools in `$PATH`, the first of which are in `$TOOLS`.
    pub fn check(&self) -> Result<()> {
        let Language { tools, checks, page, directory, .. } = &self.language;
        let homes = tools.iter().map(|tools| runtime::fetch(*tools)).collect::<Result<Vec<_>>>()?;
        let bin = |home: &PathBuf| format!("{0}/bin:{0}/node_modules/.bin:", home.display());
        let path: String = homes.iter().map(bin).collect();
        if let Some(page) = page {
            let readme = fs::read_to_string(self.language.source().join("README.md"))?;
            let blocks = markdown::blocks(&readme).into_iter();
            let blocks = blocks.filter(|block| block.mark == page.mark).skip(page.but);
            let ([before, after], [begin, end]) = (page.example, page.program);
            let code: Vec<_> = blocks.map(|one| format!("{before}{}{after}", one.code)).collect();
            ensure!(code.len() + page.but > 5, "only {} examples were found", code.len());
            let dir = out(directory).join("page");
            fs::create_dir_all(&dir)?;
            fs::write(dir.join(page.file), format!("{begin}{}{end}", code.concat()))?;
        }
        let run = |commands: &&str| {
            let commands = format!("PATH=\"{path}$PATH\"\n{commands}");
            let mut shell = self.shell(Command::new("sh"), &commands);
            let error = output_of(shell.envs(homes.first().map(|home| ("TOOLS", home)))).err()?;
            Some(format!("{error:#}"))
        };
        let found: Vec<String> = checks.iter().filter_map(run).collect();
        ensure!(found.is_empty(), "{}", found.join("\n"));
        Ok(())
    }
}
