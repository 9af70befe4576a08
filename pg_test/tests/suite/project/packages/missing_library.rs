//! The library is removed while tables are fenced: the steps that the pages advise.

use super::bare_install_dir;
use crate::project::pages::page;
use pg_test::cluster::Builder;
use pg_test::{Context, Harness, Result, ensure, harness_test};
use std::fs;
use std::sync::Arc;

#[harness_test]
fn the_emergency_exits_of_the_page_open_a_table_without_the_library(
    harness: &Harness,
) -> Result<()> {
    let text = page("docs/faq.md")?;
    let (_, advice) = text.split_once("broken or missing?").context("no such question")?;
    let advice = advice.split("\n**").next().unwrap_or_default();
    let words = advice.split('`').skip(1).step_by(2);
    let words: Vec<String> =
        words.map(|code| code.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
    let exits = |start: &str| -> Vec<String> {
        words.iter().filter(|word| word.starts_with(start)).cloned().collect()
    };
    let (for_one, for_all) = (exits("ALTER TABLE "), exits("DROP EXTENSION "));
    ensure!(for_one.len() == 2 && for_all.len() == 1, "{words:?}");
    ensure!(words.contains(&"fence_unprotect".to_owned()), "{words:?}");

    let install_dir = bare_install_dir(harness)?;
    install_dir.install(harness.extension())?;
    let library = install_dir.lib_dir().join("pg_fence.so");
    let cluster = Builder::new(Arc::new(install_dir)).start()?;
    cluster.connect("postgres")?.run(
        "CREATE EXTENSION pg_fence;
         CREATE TABLE orders (id int PRIMARY KEY); INSERT INTO orders VALUES (7); SELECT fence_protect('orders');
         CREATE TABLE others (id int PRIMARY KEY); INSERT INTO others VALUES (7);
         SELECT fence_protect('others', lease => 'other:{id}')",
    )?;
    let away = library.with_extension("away");
    fs::rename(&library, &away)?;
    let mut session = cluster.connect("postgres")?;
    let writes = |table: &str| format!("UPDATE {table} SET id = 8; TRUNCATE {table}");
    for refused in [
        "UPDATE orders SET id = 8",
        "TRUNCATE orders",
        "UPDATE others SET id = 8",
        "SELECT fence_unprotect('orders')",
    ] {
        session.refused(refused, "58P01")?;
    }
    session.run(&for_one.join("; "))?;
    session.run(&writes("orders"))?;
    fs::rename(&away, &library)?;
    let mut with = cluster.connect("postgres")?;
    with.run("INSERT INTO orders VALUES (7); SELECT fence_protect('orders')")?;
    with.refused("UPDATE orders SET id = 8", "PF002")?;
    fs::rename(&library, &away)?;
    let mut session = cluster.connect("postgres")?;
    session.refused("UPDATE others SET id = 8", "58P01")?;
    session.run(&for_all[0])?;
    session.run(&format!("{}; {}", writes("orders"), writes("others")))
}
