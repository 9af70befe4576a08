//! `~/.pgpass`: a line `host:port:database:user:password`, where `*` stands for anything.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

/// The password of the first line that fits. Where there is no such file, there is none.
pub fn password(path: &Path, host: &str, port: &str, dbname: &str, user: &str) -> Option<String> {
    let metadata = fs::metadata(path).ok().filter(fs::Metadata::is_file)?;
    if metadata.permissions().mode() & 0o077 != 0 {
        crate::say(&format!("{} is left out: others may read it (chmod 600)", path.display()));
        return None;
    }
    let text = fs::read_to_string(path).ok()?;
    text.lines().find_map(|line| password_in(line, &[host, port, dbname, user]))
}

fn password_in(line: &str, wanted: &[&str; 4]) -> Option<String> {
    if line.starts_with('#') {
        return None;
    }
    let fields = fields(line);
    let [places @ .., password] = fields.as_slice() else { return None };
    let fits = |(field, wanted): (&String, &&str)| field == "*" || field == wanted;
    let is_whole = places.len() == wanted.len();
    (is_whole && places.iter().zip(wanted).all(fits)).then(|| password.clone())
}

/// At colons; `\` takes the next character as it is.
fn fields(line: &str) -> Vec<String> {
    let mut fields = vec![String::new()];
    let mut characters = line.chars();
    while let Some(character) = characters.next() {
        let last = fields.len() - 1;
        match character {
            '\\' => fields[last].extend(characters.next()),
            // All that follows the fourth one is the password.
            ':' if fields.len() < 5 => fields.push(String::new()),
            _ => fields[last].push(character),
        }
    }
    fields
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_fits_or_does_not() {
        let wanted = ["db", "5432", "shop", "me"];
        let password = |line: &str| password_in(line, &wanted);
        assert_eq!(password("db:5432:shop:me:secret").as_deref(), Some("secret"));
        assert_eq!(password(r"*:*:*:me:a\:b:c\\").as_deref(), Some(r"a:b:c\"));
        assert_eq!(password("db:5433:*:me:secret"), None);
        assert_eq!(password("# *:*:*:*:secret"), None);
        assert_eq!(password("db:5432:shop:me"), None);
        assert_eq!(password(""), None);
    }
}
