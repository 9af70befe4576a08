//! `~/.pgpass`: lines of `host:port:database:user:password`, in which `*` matches anything.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

/// Returns the password of the first line that matches, or None if there is no such file.
pub fn password(path: &Path, host: &str, port: &str, dbname: &str, user: &str) -> Option<String> {
    let metadata = fs::metadata(path).ok().filter(fs::Metadata::is_file)?;
    if metadata.permissions().mode() & 0o077 != 0 {
        crate::say(&format!("{} is left out: others may read it (chmod 600)", path.display()));
        return None;
    }
    // Other lines may be in any encoding.
    let bytes = fs::read(path).ok()?;
    let text = String::from_utf8_lossy(&bytes);
    let found = text.lines().find_map(|line| password_in(line, &[host, port, dbname, user]));
    found.filter(|password| !password.is_empty())
}

fn password_in(line: &str, wanted: &[&str; 4]) -> Option<String> {
    let mut rest = line;
    for wanted in wanted {
        rest = match rest.strip_prefix("*:") {
            Some(after) => after,
            None => {
                let (field, after) = field(rest);
                after.filter(|_| field == *wanted)?
            }
        };
    }
    // A colon also ends the password.
    (!line.starts_with('#')).then(|| field(rest).0)
}

/// Returns the text up to the next colon, and the rest. `\` makes the next character literal.
fn field(text: &str) -> (String, Option<&str>) {
    let mut field = String::new();
    let mut characters = text.char_indices();
    while let Some((at, character)) = characters.next() {
        match character {
            '\\' => field.push(characters.next().map_or('\\', |(_, next)| next)),
            ':' => return (field, Some(&text[at + 1..])),
            _ => field.push(character),
        }
    }
    (field, None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_matches_or_does_not() {
        let wanted = ["db", "5432", "shop", "me"];
        let password = |line: &str| password_in(line, &wanted);
        assert_eq!(password("db:5432:shop:me:secret").as_deref(), Some("secret"));
        assert_eq!(password(r"*:*:*:m\e:a\:b\\:c").as_deref(), Some(r"a:b\"));
        assert_eq!(password(r"*:*:*:me:a\").as_deref(), Some(r"a\"));
        assert_eq!(password(r"\*:*:*:me:secret"), None);
        assert_eq!(password("db:5433:*:me:secret"), None);
        assert_eq!(password("# *:*:*:*:secret"), None);
        assert_eq!(password("db:5432:shop:me"), None);
        assert_eq!(password(""), None);
    }
}
