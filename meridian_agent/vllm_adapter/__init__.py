"""Every use that the agent makes of vLLM, and the check that a vLLM version provides it. Only this package and
`install` import vLLM."""
