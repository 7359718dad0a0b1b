//! The program `zebu`.

use std::process::ExitCode;

fn main() -> ExitCode {
    zebu_cli::main()
}
