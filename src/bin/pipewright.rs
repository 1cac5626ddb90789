//! The command-line program; see the `cli` module of the library.
fn main() -> std::process::ExitCode {
    pipewright::cli::main()
}
