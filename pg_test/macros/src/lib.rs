//! The attribute `#[harness_test]`, which registers a test so that it need not be listed anywhere.

#![warn(missing_docs)]

use proc_macro::{TokenStream, TokenTree};

/// Makes a `fn(&Harness) -> Result<()>` a test named `module::function`.
///
/// `#[harness_test(slow)]` is for a test that runs only with `PG_FENCE_SLOW` set (or `--include-ignored`), and
/// `#[harness_test(from = 17)]` for one that needs this version of PostgreSQL or a newer one.
#[proc_macro_attribute]
pub fn harness_test(arguments: TokenStream, function: TokenStream) -> TokenStream {
    let arguments = arguments.to_string();
    let (mut slow, mut from) = (false, 0);
    for argument in arguments.split(',').map(str::trim).filter(|text| !text.is_empty()) {
        match (argument, argument.strip_prefix("from = ").map(str::parse::<u32>)) {
            ("slow", _) => slow = true,
            (_, Some(Ok(major))) => from = major,
            _ => {
                return error(
                    "write #[harness_test], #[harness_test(slow)] or #[harness_test(from = 17)]",
                );
            }
        }
    }
    let Some(name) = name_of(&function) else {
        return error("only a function can be a test case");
    };
    let registration = format!(
        "::pg_test::inventory::submit! {{
             ::pg_test::TestCase {{ module: module_path!(), name: \"{name}\", run: {name}, slow: {slow}, from: {from} }}
         }}"
    );
    let registration: TokenStream = registration.parse().expect("it is Rust");
    // The function's own tokens are unchanged, so that errors in it point to their lines.
    [function, registration].into_iter().collect()
}

fn name_of(function: &TokenStream) -> Option<String> {
    let mut tokens = function.clone().into_iter();
    tokens.find(|token| matches!(token, TokenTree::Ident(word) if word.to_string() == "fn"))?;
    tokens.next().map(|name| name.to_string())
}

fn error(message: &str) -> TokenStream {
    format!("compile_error! {{ {message:?} }}").parse().expect("it is Rust")
}
