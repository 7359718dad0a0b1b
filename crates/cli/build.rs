//! Has the functions that short commands run lie together in the program, where the linker can.

use std::env;
use std::process::Command;

/// The target whose default linker takes the script, and the first Rust with that linker.
const TARGET: &str = "x86_64-unknown-linux-gnu";
const FIRST_MINOR: u32 = 90;

fn main() {
    println!("cargo::rerun-if-changed=startup.ld");
    let is = |name: &str, value: &str| env::var(name).is_ok_and(|found| found == value);
    let is_wanted = is("TARGET", TARGET) && is("PROFILE", "release");
    // Other linkers refuse the script, or take long for it.
    let is_default_linker = env::var_os("RUSTC_LINKER").is_none()
        && !env::var("CARGO_ENCODED_RUSTFLAGS").is_ok_and(|flags| flags.contains("link"))
        && rustc_minor().is_some_and(|minor| minor >= FIRST_MINOR);
    if is_wanted && is_default_linker {
        let directory = env::var("CARGO_MANIFEST_DIR").unwrap_or_default();
        // One argument each: in -Wl,-T,PATH a comma of the path would end it.
        for argument in ["-Xlinker", "-T", "-Xlinker", &format!("{directory}/startup.ld")] {
            println!("cargo::rustc-link-arg-bin=zebu={argument}");
        }
    }
}

/// The second number of the compiler's version.
fn rustc_minor() -> Option<u32> {
    let output = Command::new(env::var_os("RUSTC")?).arg("--version").output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    text.split('.').nth(1)?.parse().ok()
}
